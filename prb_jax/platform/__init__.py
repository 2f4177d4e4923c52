"""Devices and machines: device meshes, multi-process jobs, and object storage behind URLs."""
