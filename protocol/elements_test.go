package protocol_test

import (
	"bytes"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/gpuaas/gpuaas/protocol"
)

// allocated is how many bytes fn allocates, whatever of it is garbage again.
func allocated(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// report is the encoding of a NodeMessage with so many empty statuses, of which one holds so many bytes of text.
func report(statuses, text int) []byte {
	one, _ := proto.Marshal(&protocol.WorkloadStatus{Detail: string(bytes.Repeat([]byte{'x'}, text))})
	content := protowire.AppendBytes(protowire.AppendTag(nil, 5, protowire.BytesType), one)
	content = append(content, bytes.Repeat([]byte{5<<3 | 2, 0}, statuses)...)
	return protowire.AppendBytes(protowire.AppendTag(nil, 4, protowire.BytesType), content)
}

func TestMessageOfMillionsOfEmptyElementsIsRefusedBeforeItIsDecoded(t *testing.T) {
	raw := report(4_000_000, 0)
	var err error
	took := allocated(func() { err = protocol.Unmarshal(raw, &protocol.NodeMessage{}) })
	require.ErrorIs(t, err, protocol.ErrTooManyElements)
	require.Less(t, took, uint64(1<<20))
}

func TestLargestMessageThatIsAllowedTakesLessThan50MiB(t *testing.T) {
	const elements = protocol.MaxElements - 2 // the report and the status with the text
	raw := report(elements, protocol.MaxControlBytes-2*elements-100)
	require.LessOrEqual(t, len(raw), protocol.MaxControlBytes)
	m := &protocol.NodeMessage{}
	took := allocated(func() { require.NoError(t, protocol.Unmarshal(raw, m)) })
	require.Len(t, m.GetReport().GetWorkloads(), elements+1)
	require.Less(t, took+uint64(len(raw)), uint64(50<<20))
}

func TestElementsAreCountedInEveryKindOfMessage(t *testing.T) {
	many := bytes.Repeat([]byte{6<<3 | 2, 0}, protocol.MaxElements+1)
	require.ErrorIs(t, protocol.Unmarshal(many, &protocol.UsageSegment{}), protocol.ErrTooManyElements, "messages")
	texts := bytes.Repeat([]byte{10<<3 | 2, 0}, protocol.MaxElements+1)
	require.ErrorIs(t, protocol.Unmarshal(texts, &protocol.Hello{}), protocol.ErrTooManyElements, "texts")
	numbers := protowire.AppendBytes(protowire.AppendTag(nil, 10, protowire.BytesType),
		make([]byte, protocol.MaxElements+1))
	require.ErrorIs(t, protocol.Unmarshal(numbers, &descriptorpb.FileDescriptorProto{}), protocol.ErrTooManyElements,
		"numbers, packed")
	deep := []byte{}
	for range 1000 {
		deep = protowire.AppendBytes(protowire.AppendTag(nil, 17, protowire.BytesType), deep)
	}
	require.ErrorIs(t, protocol.Unmarshal(deep, &protocol.Workload{}), protocol.ErrTooManyElements, "nesting")
	require.Error(t, protocol.Unmarshal([]byte{0xff}, &protocol.Hello{}), "cut off")
}
