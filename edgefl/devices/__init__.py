"""Device profiles and the catalog of known boards."""

from edgefl.devices.catalog import catalog, device
from edgefl.devices.profile import DeviceProfile

__all__ = ["DeviceProfile", "catalog", "device"]
