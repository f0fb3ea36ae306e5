"""The HTTP server: OpenAI's API on top of the scheduler."""
