"""Pipeline planning: costs, exact replay, the papers' rules and a search. Nothing imports torch.

`torch_resilient.pipelining` hands out the public names.
"""
