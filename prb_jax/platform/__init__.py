"""The machines: meshes of devices, jobs of several processes, storage behind URLs."""
