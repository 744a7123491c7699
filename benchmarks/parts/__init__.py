"""What the scripts share: their command line and measuring (`timing`), random targets
(`shapes`), and llama.cpp's server (`llamacpp`)."""
