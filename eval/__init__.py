"""Decoding with drafts, and its honest measurement.

Read `trees` (draft trees and their verification), `decoding` (the decoding loop), `methods` (ways of drafting), `bench`
(the measurement), `report` (tables and report), `serving` (our server, and load tests of engines); `commands` has the
command line's commands and the files that they store in a run's folder. `speculative_decoder` is the same for scripts.
Imports all the others.
"""
