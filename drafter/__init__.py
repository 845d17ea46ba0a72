"""The DSpark algorithm in plain torch: knows no Ray, no HTTP and no KV pages."""
