"""The outages that tests.away causes: overlapping ones are one outage, and no server runs twice."""

import time
from contextlib import closing

from tests.away import Away
from tests.proxy import Request

AWAY_S = 0.5
TRANSFERS = {"upload": ("PUT ", "/up/"), "download": ("GET ", "/down/")}
UPLOAD = Request("PUT /up/1 HTTP/1.1", {}, b"x" * (2 << 20))
DOWNLOAD = Request("GET /down/1 HTTP/1.1", {"range": "bytes=0-1"})


class Server:
    """A server that records when it runs."""

    def __init__(self) -> None:
        self.running = 1
        self.most = 1
        self.starts_s: list[float] = []
        self.stops_s: list[float] = []

    def start(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.starts_s.append(time.monotonic())

    def stop(self) -> None:
        self.running -= 1
        self.stops_s.append(time.monotonic())


def test_overlapping_outages_end_together_and_each_is_long_enough():
    """The second transfer begins in the outage of the first; the server starts only once."""
    server = Server()
    with closing(Away(server, AWAY_S, TRANSFERS)) as away:
        away(UPLOAD)
        time.sleep(AWAY_S / 2)
        began_s = time.monotonic()
        away(DOWNLOAD)
    assert (server.running, server.most) == (1, 1)
    (start_s,), (stop_s,) = server.starts_s, server.stops_s
    assert start_s - began_s >= AWAY_S
    assert start_s - stop_s >= AWAY_S * 1.5
    assert away.times_s.keys() == TRANSFERS.keys()
    assert min(away.times_s.values()) >= AWAY_S


def test_a_later_outage_stops_the_server_again():
    server = Server()
    with closing(Away(server, AWAY_S, TRANSFERS)) as away:
        away(UPLOAD)
        time.sleep(AWAY_S * 2)
        away(UPLOAD)  # the second request of a transfer passes
        away(DOWNLOAD)
    assert (server.running, server.most) == (1, 1)
    assert len(server.starts_s) == len(server.stops_s) == 2
    assert min(away.times_s.values()) >= AWAY_S


def test_no_outage_begins_after_the_end():
    server = Server()
    away = Away(server, AWAY_S, TRANSFERS)
    away.close()
    away(UPLOAD)
    assert server.stops_s == []
