package httpapi

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// Law 13: a customer of a provider has many addresses of IPv6. Requests from them that never end, each within the bound
// of its address, leave room for those who log in, enroll a node or fetch a token from elsewhere.
func TestLaw13VisitorsFromOnePrefixLeaveRoomForOthers(t *testing.T) {
	var s slots
	held := 0
	for k := range 2 * maxAnonymousRequests {
		if _, err := s.acquire(slotsOfVisitor(fmt.Sprintf("2001:db8:1:%x::1", k))...); err == nil {
			held++
		}
	}
	require.Equal(t, maxPrefixRequests, held)
	_, err := s.acquire(slotsOfVisitor("2001:db8:2::1")...)
	require.NoError(t, err)
}
