"""Other drafters of the field behind the same interface, to compare with."""
