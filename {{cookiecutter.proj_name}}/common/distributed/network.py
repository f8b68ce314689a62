"""This host's address and network interface on the route to another host."""

import fcntl
import socket
import struct
from contextlib import suppress

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux' netdevice(7)


def own_address(host: str) -> str | None:
    """This host's IPv4 address as `host` sees it; None if there is only loopback."""
    # If the name resolves to this host itself, use the default route (to a reserved address: nothing is sent).
    for target in (host, "192.0.2.1"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((target, 9))  # on a datagram socket: looks up the route, sends nothing
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
    return None


def interface_towards(host: str) -> str | None:
    """Name of the interface, such as eth0; None if unknown (not Linux, no route, only loopback)."""
    address = own_address(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if address else ():
            with suppress(OSError):  # this one has no IPv4 address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
