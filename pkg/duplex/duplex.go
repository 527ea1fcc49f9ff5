// Package duplex joins two byte streams in both directions. It buffers nothing beyond one piece for each direction, so
// that a reader that is slow slows down its own sender and nobody else.
package duplex

import (
	"context"
	"errors"
	"io"
	"net"
)

// pieceBytes is what one direction holds at most. Large pieces save wake-ups of the programs on the way.
const pieceBytes = 256 << 10

// Stream is a byte stream whose two directions end on their own.
type Stream interface {
	io.ReadWriter
	// CloseWrite tells the peer that nothing more comes; reading goes on.
	CloseWrite() error
	// Close gives a stream back whose directions have both ended.
	Close() error
	// Abort ends both directions at once, so that the peer does not take the end for the end of the data. It may be
	// called several times, also while the stream is read and written.
	Abort()
}

// Join copies between a and b until both directions have ended, then closes both. An error in one direction, or the end
// of ctx, aborts both streams. It returns how many bytes each direction has delivered.
func Join(ctx context.Context, a, b Stream) (toB, toA int64, err error) {
	abort := func() {
		a.Abort()
		b.Abort()
	}
	stop := context.AfterFunc(ctx, abort)
	type result struct {
		bytes int64
		err   error
	}
	back := make(chan result, 1)
	go func() {
		n, err := oneWay(a, b)
		if err != nil {
			abort()
		}
		back <- result{n, err}
	}()
	toB, err = oneWay(b, a)
	if err != nil {
		abort()
	}
	r := <-back
	if !stop() {
		err = context.Cause(ctx)
	}
	if err = errors.Join(err, r.err); err != nil {
		abort()
		return toB, r.bytes, err
	}
	return toB, r.bytes, errors.Join(a.Close(), b.Close())
}

// oneWay copies all of from and passes its end on. The wrappers hide ReadFrom and WriteTo: those of a TCP connection
// read by smaller pieces.
func oneWay(to, from Stream) (int64, error) {
	n, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, pieceBytes))
	if err == nil {
		err = to.CloseWrite()
	}
	return n, err
}

// TCP makes a Stream of a TCP connection.
func TCP(conn *net.TCPConn) Stream { return tcpStream{conn} }

type tcpStream struct{ *net.TCPConn }

// Abort implements Stream by a reset.
func (s tcpStream) Abort() {
	_ = s.SetLinger(0)
	_ = s.Close()
}
