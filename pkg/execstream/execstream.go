// Package execstream frames what a command in a container and its caller send each other over one byte stream: a kind,
// a length and a payload. The node and the command line speak it; the hub passes the bytes on.
package execstream

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"
)

// Kind says what a frame carries.
type Kind byte

// The kinds. The caller sends the first three, the node the others.
const (
	// Stdin is input of the command, StdinEnd the end of it.
	Stdin Kind = iota + 1
	StdinEnd
	// Resize is the size of the caller's terminal (Size).
	Resize
	Stdout
	Stderr
	// Exit is the last frame: the exit code, in four bytes.
	Exit
	// Failed is the last frame where the command has no exit code: the reason, for people.
	Failed
)

const (
	headerBytes = 5
	// MaxPayload bounds the payload of a frame.
	MaxPayload = 32 << 10
)

// Size is that of a terminal.
type Size struct{ Rows, Columns uint16 }

// Command is a command in a container with a caller at its ends.
type Command struct {
	Argv []string
	// Terminal gives the command a terminal of the given size; its errors then come as output.
	Terminal       bool
	Size           Size
	Resize         <-chan Size
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// Encode is the payload of a Resize frame.
func (s Size) Encode() []byte {
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, s.Rows), s.Columns)
}

// DecodeSize reads the payload of a Resize frame; ok is false for any other.
func DecodeSize(p []byte) (s Size, ok bool) {
	if len(p) != 4 {
		return Size{}, false
	}
	return Size{Rows: binary.BigEndian.Uint16(p), Columns: binary.BigEndian.Uint16(p[2:])}, true
}

// EncodeExit is the payload of an Exit frame.
func EncodeExit(code int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(code)) }

// DecodeExit reads the payload of an Exit frame; ok is false for any other.
func DecodeExit(p []byte) (code int, ok bool) {
	if len(p) != 4 {
		return 0, false
	}
	return int(binary.BigEndian.Uint32(p)), true
}

// Writer sends frames; several goroutines may use it.
type Writer struct {
	mu sync.Mutex
	to io.Writer
}

// NewWriter sends frames on the stream.
func NewWriter(to io.Writer) *Writer { return &Writer{to: to} }

// Send sends the payload in as many frames as it needs, one at least.
func (w *Writer) Send(kind Kind, payload []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		part := payload[:min(len(payload), MaxPayload)]
		frame := make([]byte, headerBytes, headerBytes+len(part))
		frame[0] = byte(kind)
		binary.BigEndian.PutUint32(frame[1:], uint32(len(part)))
		if _, err := w.to.Write(append(frame, part...)); err != nil {
			return err
		}
		if payload = payload[len(part):]; len(payload) == 0 {
			return nil
		}
	}
}

// Stream sends what is written to it as frames of one kind.
func (w *Writer) Stream(kind Kind) io.Writer { return kindWriter{w, kind} }

type kindWriter struct {
	w    *Writer
	kind Kind
}

// Write implements io.Writer.
func (k kindWriter) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if err := k.w.Send(k.kind, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Receive reads one frame. It returns io.EOF where the stream ends between two.
func Receive(r io.Reader) (Kind, []byte, error) {
	var header [headerBytes]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	size := binary.BigEndian.Uint32(header[1:])
	if size > MaxPayload {
		return 0, nil, fmt.Errorf("a frame has %d bytes; %d are allowed", size, MaxPayload)
	}
	payload := make([]byte, size)
	if _, err := io.ReadFull(r, payload); err != nil {
		return 0, nil, io.ErrUnexpectedEOF
	}
	return Kind(header[0]), payload, nil
}
