package execstream_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/execstream"
)

func TestFramesComeAsTheyWereSent(t *testing.T) {
	var wire bytes.Buffer
	w := execstream.NewWriter(&wire)
	large := bytes.Repeat([]byte("x"), 2*execstream.MaxPayload+1)
	_, err := w.Stream(execstream.Stdout).Write(large)
	require.NoError(t, err)
	require.NoError(t, w.Send(execstream.StdinEnd, nil))
	require.NoError(t, w.Send(execstream.Resize, execstream.Size{Rows: 24, Columns: 300}.Encode()))
	require.NoError(t, w.Send(execstream.Exit, execstream.EncodeExit(137)))
	var got []byte
	for range 3 {
		kind, payload, err := execstream.Receive(&wire)
		require.NoError(t, err)
		require.Equal(t, execstream.Stdout, kind)
		got = append(got, payload...)
	}
	require.Equal(t, large, got)
	kind, payload, err := execstream.Receive(&wire)
	require.NoError(t, err)
	require.Equal(t, execstream.StdinEnd, kind)
	require.Empty(t, payload)
	_, payload, err = execstream.Receive(&wire)
	require.NoError(t, err)
	size, ok := execstream.DecodeSize(payload)
	require.True(t, ok)
	require.Equal(t, execstream.Size{Rows: 24, Columns: 300}, size)
	_, payload, err = execstream.Receive(&wire)
	require.NoError(t, err)
	code, ok := execstream.DecodeExit(payload)
	require.True(t, ok)
	require.Equal(t, 137, code)
	_, _, err = execstream.Receive(&wire)
	require.ErrorIs(t, err, io.EOF)
}

func FuzzReceiveHoldsItsLimit(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 1, 'a'})
	f.Add([]byte{1, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, wire []byte) {
		for r := bytes.NewReader(wire); ; {
			_, payload, err := execstream.Receive(r)
			if err != nil {
				return
			}
			require.LessOrEqual(t, len(payload), execstream.MaxPayload)
			_, _ = execstream.DecodeSize(payload)
			_, _ = execstream.DecodeExit(payload)
		}
	})
}

func TestAFrameOverTheLimitIsRefused(t *testing.T) {
	frame := binary.BigEndian.AppendUint32([]byte{byte(execstream.Stdin)}, execstream.MaxPayload+1)
	_, _, err := execstream.Receive(bytes.NewReader(append(frame, make([]byte, execstream.MaxPayload+1)...)))
	require.ErrorContains(t, err, "32768 are allowed")
}
