"""Draft trees and their verification: functions of tokens, parents, p (target) and q (drafter), without a model.

Read `verify`, then `path_lookup` (draft tokens found in the earlier text). `enumeration` proves that verification is
exact by running it for all random outcomes. May import files of `models`, and `models/kernels` and `models/decoding`.
"""
