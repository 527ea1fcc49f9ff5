package agent_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// TestEveryFieldOfAStatusCounts sets one field after the other: a status that differs in it must not count as the same.
func TestEveryFieldOfAStatusCounts(t *testing.T) {
	list := func(s *protocol.WorkloadStatus) []*protocol.WorkloadStatus { return []*protocol.WorkloadStatus{s} }
	fields := (&protocol.WorkloadStatus{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		s := &protocol.WorkloadStatus{}
		m := s.ProtoReflect()
		switch {
		case f.IsList():
			m.Mutable(f).List().AppendMutable()
		case f.Kind() == protoreflect.MessageKind:
			m.Mutable(f)
		case f.Kind() == protoreflect.StringKind:
			m.Set(f, protoreflect.ValueOfString("x"))
		case f.Kind() == protoreflect.Int32Kind:
			m.Set(f, protoreflect.ValueOfInt32(1))
		case f.Kind() == protoreflect.Uint32Kind:
			m.Set(f, protoreflect.ValueOfUint32(1))
		case f.Kind() == protoreflect.Uint64Kind:
			m.Set(f, protoreflect.ValueOfUint64(1))
		case f.Kind() == protoreflect.BytesKind:
			m.Set(f, protoreflect.ValueOfBytes([]byte{1}))
		case f.Kind() == protoreflect.EnumKind:
			m.Set(f, protoreflect.ValueOfEnum(1))
		default:
			require.Fail(t, "a field of a kind that this test does not know", f.Name())
		}
		require.False(t, agent.EqualStatuses(list(&protocol.WorkloadStatus{}), list(s)), f.Name())
		require.True(t, agent.EqualStatuses(list(s), list(proto.CloneOf(s))), f.Name())
	}
	require.False(t, agent.EqualStatuses(nil, list(&protocol.WorkloadStatus{})))
}
