"""How long tests wait for what has to come: as upper bounds, where something hangs.

A shared machine may have a tenth of its cores for minutes (seen: 88 % were taken by others), and
may stand still for seconds. So no test may fail because something was slow.
"""

HANG_S = 300.0
