"""The connections between the GPUs of this machine, in the abbreviations of `nvidia-smi topo -m`."""

from collections.abc import Mapping
from typing import Any

import pynvml

from ddp_kit.launcher.devices.nvml import handles, query

MEANING = {
    "NV": "this many NVLinks",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the connection between NUMA nodes",
}
_LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
_Address = tuple[int, int, int]
_SWITCH: _Address = (-1, -1, -1)
_TO_SWITCH = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH


def links() -> Mapping[int, Mapping[int, str]]:
    """GPU number -> other GPU's number -> `NV18`, `SYS` and so on; without pairs that NVML does not report.

    NVLinks between two GPUs are added up, including those through NVSwitches.
    """
    with handles() as found:
        cables = {index: _nvlinks(handle) for index, handle in found}
        addresses = {index: _address(query(pynvml.nvmlDeviceGetPciInfo, handle)) for index, handle in found}
        table: dict[int, dict[int, str]] = {index: {} for index, _ in found}
        for one, handle in found:
            for other, neighbour in found:
                if one == other:
                    continue
                direct = cables[one].count(addresses[other])
                switched = min(cables[one].count(_SWITCH), cables[other].count(_SWITCH))
                level = query(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle, neighbour)
                kind = f"NV{direct + switched}" if direct + switched else _LEVELS.get(level)
                if kind:
                    table[one][other] = kind
        return table


def _nvlinks(handle: Any) -> list[_Address | None]:
    """The other end of each NVLink of a GPU: the PCI address of a GPU, or a switch."""
    ends: list[_Address | None] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        active = query(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if active is None:  # there is no such link
            break
        if active and query(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == _TO_SWITCH:
            ends.append(_SWITCH)
        elif active:
            ends.append(_address(query(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)))
    return ends


def _address(pci: Any) -> _Address | None:
    return (pci.domain, pci.bus, pci.device) if pci else None
