"""The engine: one model, its KV cache, and the step that drafts, admits, verifies and commits."""
