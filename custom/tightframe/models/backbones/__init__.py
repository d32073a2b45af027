"""Backbones by paper: each file ends in a ``BackboneSpec``, which ``tightframe.models`` lists."""
