"""Code shared by the scripts: command line and timing (`timing`), random targets (`shapes`), llama.cpp (`llamacpp`)."""
