package cli

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// The exit codes of what a hub answers are those that "gpuaas exit-codes" lists.
func TestAnswersHaveTheirExitCodes(t *testing.T) {
	for code, statuses := range map[int][]int{
		3: {http.StatusUnauthorized},
		4: {http.StatusForbidden},
		5: {http.StatusNotFound},
		6: {http.StatusConflict, http.StatusPreconditionFailed},
		7: {http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity},
		8: {
			http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
			http.StatusServiceUnavailable,
		},
	} {
		for _, status := range statuses {
			err := fmt.Errorf("wrapped: %w", &client.Problem{Status: int32(status)})
			require.Equal(t, code, exitCode(err), status)
		}
	}
}
