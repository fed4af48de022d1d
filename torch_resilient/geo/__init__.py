"""Training across sites: schedules, choice of sites, times and prices. Nothing here needs torch.

`torch-resilient geo` is the command for it.
"""
