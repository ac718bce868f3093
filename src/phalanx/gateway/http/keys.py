"""Who may ask: compares the key that a request carries, in time that does not tell how much fits."""

from __future__ import annotations

import hmac

from phalanx.gateway.http.router import Access

_BEARER, _OPENPI = b"Bearer ", b"Api-Key "


class Keys:
    """`api_key` opens inference, `admin_key` administration and inference. Where there is one of
    them, it opens both, and nothing is open without it; without any key all is open. Callers send `Bearer KEY`, or `Api-Key KEY` as
    openpi's clients do.
    """

    def __init__(self, api_key: str | None = None, admin_key: str | None = None) -> None:
        api = None if api_key is None else _BEARER + api_key.encode()
        admin = None if admin_key is None else _BEARER + admin_key.encode()
        self._admin = api if admin is None else admin
        self._inference = admin if api is None else api

    def allow(self, access: Access, authorization: bytes) -> bool:
        if access is Access.OPEN:
            return True
        if authorization.startswith(_OPENPI):
            authorization = _BEARER + authorization.removeprefix(_OPENPI)
        wanted = self._admin if access is Access.ADMIN else self._inference
        if wanted is None or hmac.compare_digest(authorization, wanted):
            return True
        admin = self._admin
        return admin is not None and hmac.compare_digest(authorization, admin)
