"""Running packed models: the CPU engine, sampling, text generation and the HTTP server."""
