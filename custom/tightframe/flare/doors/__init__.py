"""The engine's doors: rules on which messages a process accepts, and from whom.

NVFlare serves shell commands, deletion, shutdown and its debugging topics to any sender, and checks
rights only where the sender asks for the check. A component in the site's or the server's own
``local/resources.json`` shuts all of that (``SiteDoors``, ``ServerDoors``); without it no production job
runs.
"""

from tightframe.flare.doors.engine import PARENT, ServerDoors, SiteDoors, require

__all__ = ["PARENT", "ServerDoors", "SiteDoors", "require"]
