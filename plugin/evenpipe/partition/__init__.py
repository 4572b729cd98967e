"""DawnPiper: traces a model node by node, profiles it, and finds where to cut it into stages, and what to save.

The way of a model through the modules (room `layouts` is beside it: whole layers of Megatron's, by the flags of a run):

1. Model: `models` builds it, known by name (`configurations`) or described by a user's file, with a micro-batch.
2. Trace: `trace.exporting` refuses what a graph would not do (`trace.effects`, `trace.state`) and exports the forward
   up to its loss; `trace.observing` sees what each node reads, makes, changes and draws.
3. Order: `trace.ordering` sorts the nodes by depth and says after which a stage may end; `trace.graph` is the result.
4. Profile: `counting` counts bytes and work of each node, `timing` its milliseconds; `profiling` puts them into a
   `profile`, for one micro-batch size or for any.
5. Cut: `costs` weighs stages; `dawnpiper` (the paper's algorithm) and `search` (the exact one) find cuts, and what each
   stage recomputes and swaps, for a memory limit: a `search.plan`.
6. Write code, in room `stage_code`: `writing` makes a file of each stage and `body` the statements of its forward;
   nodes that recompute or swap go through `keep`, by the table of `keeping`.
7. Load: `loading` executes the file and gives its `part` the model's tensors; `comparing` holds the stages against
   the model. `torch/planned.py` trains them.
"""
