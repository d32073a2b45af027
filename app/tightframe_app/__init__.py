"""Tools outside the engine: the ``tightframe`` command and the job recipes."""
