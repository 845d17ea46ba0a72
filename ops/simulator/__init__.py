"""A fleet on paper: the real `allocate` and `admit` over simulated engines, requests and acceptances."""
