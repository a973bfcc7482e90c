"""Putting data into place: fetched as torchvision does, or unpacked from a local archive, once for all processes."""
