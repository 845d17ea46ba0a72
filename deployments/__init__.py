"""The service: Ray Serve deployments behind an OpenAI-compatible HTTP API."""
