package db_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

func TestFirstIDDividesIDsByTheirTime(t *testing.T) {
	before := db.NewID()
	first := db.FirstID(time.Now().Add(time.Second))
	require.True(t, db.IsID(first))
	require.Less(t, before, first)
	require.Less(t, db.FirstID(time.Now().Add(-time.Second)), before)
	require.Equal(t, "00000000-0000-7000-8000-000000000000", db.FirstID(time.Unix(-1, 0)), "no id is older than the epoch")
}
