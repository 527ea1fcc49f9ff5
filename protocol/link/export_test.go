package link

import (
	"context"
	"crypto/tls"
	"net"

	"github.com/quic-go/quic-go"
)

// Places is how many places a listener has here, SourcePlaces how many of them one source may have.
func Places() int { return places() }

// SourcePlaces is how many places callers from one source may have.
func SourcePlaces() int { return sourcePlaces(places()) }

// ListenOn is Listen on a socket of a simulated network.
func ListenOn(socket net.PacketConn, tlsConf *tls.Config, reset *ResetKey) (*Listener, error) {
	return listen(socket, tlsConf, reset)
}

// DialFrom is Dial from a socket of a simulated network.
func DialFrom(ctx context.Context, socket net.PacketConn, to net.Addr, tlsConf *tls.Config) (*Conn, error) {
	qc, err := quic.Dial(ctx, socket, to, tlsConf, config())
	if err != nil {
		return nil, err
	}
	return dialled(qc), nil
}
