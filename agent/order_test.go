package agent_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestLaw02OnlyTheSameOrANewerStateIsInOrder(t *testing.T) {
	highest := agent.StateNumber{Epoch: 2, Generation: 5}
	for number, refused := range map[agent.StateNumber]protocol.Nack_Reason{
		{Epoch: 1, Generation: 9}: protocol.Nack_EPOCH_UNKNOWN,
		{Epoch: 2, Generation: 4}: protocol.Nack_GENERATION_OLDER,
		{Epoch: 2, Generation: 5}: 0,
		{Epoch: 2, Generation: 6}: 0,
		{Epoch: 3, Generation: 1}: 0,
	} {
		require.Equal(t, refused, protocol.RefusalOf(number.CheckOrder(highest)), number)
		require.NoError(t, number.CheckContent(highest, true), number)
		conflict := protocol.RefusalOf(number.CheckContent(highest, false))
		require.Equal(t, number == highest, conflict == protocol.Nack_GENERATION_CONFLICT, number)
	}
	require.NoError(t, agent.NumberOf(nil).CheckOrder(agent.StateNumber{}), "no state, and none was accepted")
	require.Error(t, agent.NumberOf(nil).CheckOrder(highest))
}
