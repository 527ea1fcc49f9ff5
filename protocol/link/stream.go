package link

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// ErrTooLarge is returned by Receive for a message above the caller's limit. Nothing of it is kept, and the stream is of no
// further use.
var ErrTooLarge = errors.New("link: message is larger than its limit")

// readBufferBytes is enough for what idle peers say. What is larger is read past the buffer, and every stream of thousands of nodes
// has one.
const readBufferBytes = 512

// Stream is one stream of length-delimited messages, or of raw bytes after the messages that both sides agreed on.
// One goroutine may read while others send.
type Stream struct {
	qs *quic.Stream
	r  *bufio.Reader

	sending sync.Mutex
}

func newStream(qs *quic.Stream) *Stream {
	return &Stream{qs: qs, r: bufio.NewReaderSize(qs, readBufferBytes)}
}

// Send writes one message, length first. It blocks while the peer does not read. Messages of several senders do not mix.
func (s *Stream) Send(m proto.Message) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	if _, err := protodelim.MarshalTo(s.qs, m); err != nil {
		return fmt.Errorf("link: send %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return nil
}

// Receive reads one message of at most maxBytes into m. It returns io.EOF when the peer closed the stream between messages.
func (s *Stream) Receive(m proto.Message, maxBytes int) error {
	if maxBytes <= 0 {
		return fmt.Errorf("link: receive %s: no byte limit", m.ProtoReflect().Descriptor().Name())
	}
	err := protodelim.UnmarshalOptions{MaxSize: int64(maxBytes)}.UnmarshalFrom(s.r, m)
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	s.qs.CancelRead(streamCanceled)
	if large, is := errors.AsType[*protodelim.SizeTooLargeError](err); is {
		return fmt.Errorf("%w: %s of %d bytes, %d allowed", ErrTooLarge, m.ProtoReflect().Descriptor().Name(), large.Size, maxBytes)
	}
	return fmt.Errorf("link: receive %s: %w", m.ProtoReflect().Descriptor().Name(), err)
}

// Read reads raw bytes.
func (s *Stream) Read(p []byte) (int, error) { return s.r.Read(p) }

// Write writes raw bytes.
func (s *Stream) Write(p []byte) (int, error) {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.qs.Write(p)
}

// CloseWrite tells the peer that nothing more will be sent; reading goes on.
func (s *Stream) CloseWrite() error { return s.qs.Close() }

// Close delivers what was sent and stops reading.
func (s *Stream) Close() error {
	s.qs.CancelRead(streamCanceled)
	return s.qs.Close()
}

// Abort gives up both directions at once; what was sent may be lost.
func (s *Stream) Abort() {
	s.qs.CancelRead(streamCanceled)
	s.qs.CancelWrite(streamCanceled)
}

// Done is closed when nothing more can be sent: the peer has stopped reading, or the stream or its connection is closed.
func (s *Stream) Done() <-chan struct{} { return s.qs.Context().Done() }

// SetDeadline bounds reads and writes; the zero time lifts the bound.
func (s *Stream) SetDeadline(t time.Time) error { return s.qs.SetDeadline(t) }

// SetReadDeadline bounds reads.
func (s *Stream) SetReadDeadline(t time.Time) error { return s.qs.SetReadDeadline(t) }

// SetWriteDeadline bounds writes.
func (s *Stream) SetWriteDeadline(t time.Time) error { return s.qs.SetWriteDeadline(t) }

// prioritise lets decisions overtake bulk: urgency as in RFC 9218, lower first.
func (s *Stream) prioritise(kind protocol.StreamHeader_Kind) {
	urgency := map[protocol.StreamHeader_Kind]int8{
		protocol.StreamHeader_KIND_CONTROL: 0,
		protocol.StreamHeader_KIND_USAGE:   2,
		protocol.StreamHeader_KIND_TUNNEL:  3,
		protocol.StreamHeader_KIND_FETCH:   4,
	}
	if u, known := urgency[kind]; known {
		s.qs.SetPriority(u, true)
	}
}
