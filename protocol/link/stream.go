package link

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// ErrTooLarge is returned by Receive for a message above the caller's limit. Nothing of it is kept, and the stream is
// of no further use.
var ErrTooLarge = errors.New("link: message is larger than its limit")

// readBufferBytes is enough for what idle peers say. What is larger is read past the buffer, and every stream of
// thousands of nodes has one.
const readBufferBytes = 512

// growBytes is the first size of the buffer of a message that is larger.
const growBytes = 64 << 10

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

// Send writes one message, length first. It blocks while the peer does not read. Messages of several senders do not
// mix.
func (s *Stream) Send(m proto.Message) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	if _, err := protodelim.MarshalTo(s.qs, m); err != nil {
		return fmt.Errorf("link: send %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return nil
}

// Receive reads one message of at most maxBytes into m, and counts its elements before it is decoded. It returns io.EOF
// when the peer closed the stream between messages.
func (s *Stream) Receive(m proto.Message, maxBytes int) error {
	name := m.ProtoReflect().Descriptor().Name()
	if maxBytes <= 0 {
		return fmt.Errorf("link: receive %s: no byte limit", name)
	}
	raw, err := s.readMessage(maxBytes)
	if err == nil {
		err = protocol.Unmarshal(raw, m)
	}
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	s.qs.CancelRead(streamCanceled)
	return fmt.Errorf("link: receive %s: %w", name, err)
}

// readMessage reads one message, length first. The buffer grows with what has come, not with what the peer says will
// come.
func (s *Stream) readMessage(maxBytes int) ([]byte, error) {
	size, err := binary.ReadUvarint(s.r)
	if err != nil {
		return nil, err
	}
	if size > uint64(maxBytes) {
		return nil, fmt.Errorf("%w: %d bytes, %d allowed", ErrTooLarge, size, maxBytes)
	}
	raw := make([]byte, 0, min(int(size), growBytes))
	for len(raw) < int(size) {
		had := len(raw)
		raw = slices.Grow(raw, min(int(size)-had, max(had, growBytes)))
		raw = raw[:min(cap(raw), int(size))]
		if _, err := io.ReadFull(s.r, raw[had:]); err != nil {
			return nil, cutShort(err)
		}
	}
	return raw, nil
}

// cutShort keeps the end of a stream inside a message apart from the end between two.
func cutShort(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
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

// Done is closed when nothing more can be sent: the peer has stopped reading, or the stream or its connection is
// closed.
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
