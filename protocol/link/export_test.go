package link

import (
	"crypto/tls"
	"net"
)

// Places is how many places a listener has here, SourcePlaces how many of them one source may have.
func Places() int { return places() }

// SourcePlaces is how many places callers from one source may have.
func SourcePlaces() int { return sourcePlaces(places()) }

// ListenOn is Listen on a socket of a simulated network.
func ListenOn(socket net.PacketConn, tlsConf *tls.Config, reset *ResetKey) (*Listener, error) {
	return listen(socket, tlsConf, reset)
}
