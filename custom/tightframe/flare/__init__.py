"""The NVFlare binding: the only folder of the package that imports nvflare."""
