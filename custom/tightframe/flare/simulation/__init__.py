"""The engine's simulator: started without its command line, its workspace, its processes."""
