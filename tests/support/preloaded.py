"""What processes that are forked for tests have imported already: see processes.py.

Garbage is not looked for meanwhile, nor later in what is here then: a collection would copy all
these pages in each process.
"""

import gc
from importlib import import_module

gc.disable()
for name in ("pytest", "torch.distributed", "worker.weights.loader", "router.http.app"):
    import_module(name)
gc.freeze()
gc.enable()
