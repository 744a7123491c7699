"""What the scripts share: their command line and measuring (`timing`), and llama.cpp's server (`llamacpp`)."""
