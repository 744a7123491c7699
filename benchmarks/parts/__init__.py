"""What the scripts share: random targets and drafters (`shapes`), measuring (`timing`), the parts of `gpu.py`
(`training`, `decoding`), and llama.cpp's server.
"""
