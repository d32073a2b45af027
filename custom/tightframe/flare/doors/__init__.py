"""The engine's doors: which of its messages a process accepts, and from whom.

NVFlare serves shell commands, deletion, shutdown and its debugging topics to whoever sends them, and asks
for a right only where the sender asks it to. A site's, or the server's, own ``local/resources.json`` names
a component that shuts all of that (``SiteDoors``, ``ServerDoors``); in production no job runs without it.
"""

from tightframe.flare.doors.engine import PARENT, ServerDoors, SiteDoors, require

__all__ = ["PARENT", "ServerDoors", "SiteDoors", "require"]
