"""A relay on 127.0.0.1 in front of a server, that cuts connections where a test says, and may speak TLS."""

import contextlib
import socket
import ssl
import threading


class Relay:
    """Passes bytes on. `answers_left`: how many bytes of answers still pass before every connection is cut."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = port
        self._tls = tls
        self.answers_left: int | None = None
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Ends all connections there are."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._tls is not None:
                    client = self._tls.wrap_socket(client, server_side=True)
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self.connections += 1
            self._sockets += [client, server]
            for source, sink, answers in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass, args=(source, sink, answers), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if answers and self.answers_left is not None:
                    data = data[: self.answers_left]
                    self.answers_left -= len(data)
                sink.sendall(data)
                if answers and self.answers_left == 0:
                    break
        except OSError:
            pass
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
