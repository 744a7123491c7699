"""What watches over a training while it runs.

Read `step_guard` first: it looks at every step's loss and gradient, with `suspect_batch` for what it writes down. Then
`validation`: which weights are kept and when training ends, by rows kept out of it; `decoded_chains` is a real decode
of such prompts; `trackers` is what `train.report_to` needs beside transformers' callbacks, `progress_lines` what a log
file gets in place of a bar. May import `train.batches`, `train.features` and `train.processes`.
"""
