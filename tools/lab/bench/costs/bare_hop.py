"""A process that only passes frames between one client and an engine: the least that any router costs here."""

import sys

import zmq


def main(listen: str, engine: str) -> None:
    """Pass frames on until the process is killed; print a line once clients can connect."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer, identity = context.socket(zmq.ROUTER), context.socket(zmq.DEALER), b""
    router.bind(listen)
    dealer.connect(engine)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(dealer, zmq.POLLIN)
    print("ready", flush=True)
    while True:
        for socket, _ in poller.poll():
            if socket is router:
                identity, frame = router.recv_multipart()
                dealer.send(frame)
            else:
                router.send_multipart([identity, dealer.recv()])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
