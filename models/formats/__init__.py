"""Layouts that other programs load: ours to theirs, and theirs to ours.

Read `layout` (what a layout is made of), then `eagle`, the richest of the layouts; the others are `dflash`, `heads`
(Medusa and Hydra), `causal_lm` and `vllm_layout`. Each of these files has the conversions in both directions, the rules
for drafters that its layout cannot express, and its `EXPORTERS`. `exporting` lists the formats of each kind and their
serving commands, writes a folder and checks it; `importing` converts a published checkpoint to a drafter; `llamacpp`
writes GGUF files. Tensors and configs only: the one forward here is vLLM's of parallel drafters, `vllm_parallel`, which
`vllm_plugin` registers with vLLM and nothing else imports. May import all of `models`.
"""
