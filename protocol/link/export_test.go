package link

import (
	"crypto/tls"
	"net"
)

// ListenOn is Listen on a socket of a simulated network.
func ListenOn(socket net.PacketConn, tlsConf *tls.Config, reset *ResetKey) (*Listener, error) {
	return listen(socket, tlsConf, reset)
}
