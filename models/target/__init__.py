"""The target: loaded once, frozen, tapped for features.

Read `loading`, then `features` (what drafters read of it); `gguf_file` and `quantized` are about targets in those
formats, `packaged` about some from PyPI. `text_model` takes it out of a wrapper, `view` gives its config's values
one name each, `architectures` says what transformers' classes make of them, `windows` has its sliding windows, `checks`
compares all that with the target itself. May import `recipes`, `models.kernels` and the files of `models`.
"""
