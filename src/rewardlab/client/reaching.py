"""How a server is reached: certificates and proxies of the environment, and what to do where they are in the way."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from typing import Any, Final, TypeVar
from urllib.request import getproxies_environment, proxy_bypass

import httpx2

from rewardlab.core.errors import ConfigError

C = TypeVar("C")
NAMED: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of the environment that httpx2 reads."""
HEADER_NAME: Final = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
HEADER_VALUE: Final = re.compile(rb"(?:[^\x00\s]+(?:[ \t]+[^\x00\s]+)*)?")
"""What HTTP allows (RFC 9110, 5.1 and 5.5)."""
OTHER_NAMES: Final = (62, 64)
"""OpenSSL's numbers for a certificate that is for other names, or other addresses, than the one that was called."""
EXPIRED: Final = 10
"""OpenSSL's number for a certificate whose time is over."""
NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""OpenSSL's words where what answers does not speak TLS."""
LOOK: Final = "See that the server is up and its address is right."


def opened(kind: Callable[..., C], url: str, **options: Any) -> C:
    """Return a client of httpx2 (`kind`) for an address.

    Raises ConfigError if httpx2 cannot use the options, or the proxies and certificates that the environment names.
    """
    # A proxy that the environment names cannot reach the loopback address of this machine; its certificates count.
    trusts = not {"trust_env", "verify"} & options.keys() and httpx2.URL(url).scheme == "https"
    options.setdefault("trust_env", not is_local(url))
    reads = options["trust_env"] or trusts
    named = f", or the environment's proxies or certificates ({', '.join(NAMED)})" if reads else ""
    try:
        if trusts:
            options["verify"] = httpx2.create_ssl_context()
        client = kind(**options)
        headers = httpx2.Headers(options.get("headers")).raw
    # A proxy may need a package that is not installed, and have an address that is none.
    except (TypeError, ValueError, OSError, ImportError, httpx2.InvalidURL) as error:
        raise ConfigError(f"httpx_options{named}: httpx2 cannot use them: {str(error).rstrip('.')}.") from error
    for name, value in headers:
        # httpx2 would say so when it is asked, as if the server were away, and show the value, which may be secret.
        if not HEADER_NAME.fullmatch(name):
            raise ConfigError(
                f"httpx_options: HTTP cannot carry the name of a header of {len(name)} characters, which is not shown, "
                f"since a value may stand in it. Give headers as a mapping of names to values."
            )
        if not HEADER_VALUE.fullmatch(value):
            raise ConfigError(
                f"httpx_options: HTTP cannot carry the value of the header {name.decode('ascii')!r:.60}, such as one "
                f"with an end of line."
            )
    return client


def is_local(url: str) -> bool:
    """Return whether an address belongs to this machine; 0.0.0.0 and :: do, as what a server on all of them says."""
    host = httpx2.URL(url).host
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def proxy_of(url: str, options: Mapping[str, Any]) -> str:
    """Return the name of the environment's variable with the proxy that is asked for an address; empty if none is.

    `options` are those of the client.
    """
    if not options.get("trust_env", not is_local(url)) or any(options.get(own) for own in ("proxy", "mounts")):
        return ""
    address, proxies = httpx2.URL(url), getproxies_environment()
    if proxy_bypass(address.host):
        return ""
    return next((f"{scheme.upper()}_PROXY" for scheme in (address.scheme, "all") if proxies.get(scheme)), "")


def by_proxy(proxy: str) -> str:
    """Return a sentence behind an error that a proxy of the environment (`proxy_of`) may have made; empty for none."""
    if not proxy:
        return ""
    return f" The environment's proxy ({proxy}) was asked: add the server's host to NO_PROXY if it needs none."


def lasting(error: BaseException) -> str:
    """Return what to do about a failure that another attempt would not change; empty for one that may pass.

    Such are certificates that are not trusted, and an address of https at which nothing speaks TLS.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _of_certificate(getattr(cause, "verify_code", 0))
        if isinstance(cause, ssl.SSLError) and getattr(cause, "reason", None) in NO_TLS:
            return "What answers there does not speak TLS: give an address with http://, or the port of https."
    return ""


def _of_certificate(code: int) -> str:
    if code in OTHER_NAMES:
        return "Call the server by a name for which its certificate was made."
    if code == EXPIRED:
        return "The server needs a new certificate."
    return (
        "If the server's certificate is signed by an authority of your own, name the file with that authority's "
        "certificate in the environment: SSL_CERT_FILE. In Python httpx_options={'verify': CONTEXT} takes an "
        "ssl.SSLContext too."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, one after the other."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__
