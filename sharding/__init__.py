"""How one language model is split over N ranks: what is legal, what it costs, and the split itself.

This package starts no process and knows no host. Its parts, in reading order:

- `placement`: the vocabulary (`column`, `row`, `heads`, `replicated`, ...) and the arithmetic of cuts;
- `families`: one file per model family, tables written in that vocabulary;
- `plan`: tables and a lazily built model give a `Plan`, or reasons why there is none;
- `apply`: a `Plan` and a group turn the whole model into one rank's share;
- `trace`: what a decode step asks of `mx.distributed`, for any code, without weights;
- `lockstep`: N ranks in one process, for tests.
"""
