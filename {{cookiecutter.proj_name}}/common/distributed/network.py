"""Which of our addresses and network interfaces lead to another host."""

import socket
import struct
import sys


def interface_towards(host: str) -> str | None:
    """The interface's name, such as eth0; None where it is not known (not Linux, no route, only loopback)."""
    address = own_address(host) if sys.platform.startswith("linux") else None
    return None if address is None else _interface_with(address)


def own_address(host: str) -> str | None:
    """This host's IPv4 address as `host` sees it; None where there is only loopback."""
    # Where the name leads back to ourselves, the way out to anywhere (a reserved address: nothing is sent).
    for target in (host, "192.0.2.1"):
        address = _address_towards(target)
        if address is not None and not address.startswith("127."):
            return address
    return None


def _address_towards(target: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # of a datagram socket: looks up the route, sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interface_with(address: str) -> str | None:
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR of netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), get_address, request)
            except OSError:  # has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
