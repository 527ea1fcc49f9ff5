package query

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/event"
)

func TestEveryTypeOfEventHasAPermissionToSeeIt(t *testing.T) {
	for _, of := range event.Types() {
		require.NotEmpty(t, permissionOfEvent(of), of)
	}
	require.Empty(t, permissionOfEvent("unknown.type"))
}
