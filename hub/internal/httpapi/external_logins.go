package httpapi

import (
	"context"
	"time"
)

// StartBrowserLogin begins a login at the identity provider.
func (s *Server) StartBrowserLogin(ctx context.Context,
	_ StartBrowserLoginRequestObject,
) (StartBrowserLoginResponseObject, error) {
	login, err := s.Commands.StartBrowserLogin(ctx, metaFrom(ctx))
	return StartBrowserLogin200JSONResponse{State: login.State, URL: login.URL, ExpiresAt: login.ExpiresAt}, err
}

// FinishBrowserLogin starts a session with what the identity provider sent back.
func (s *Server) FinishBrowserLogin(ctx context.Context,
	r FinishBrowserLoginRequestObject,
) (FinishBrowserLoginResponseObject, error) {
	tokens, err := s.Commands.FinishBrowserLogin(ctx, metaFrom(ctx), r.Body.State, r.Body.Code, userAgent(ctx))
	return FinishBrowserLogin200JSONResponse(tokensView(ctx, tokens)), err
}

// StartDeviceLogin begins a login that is confirmed on another device.
func (s *Server) StartDeviceLogin(ctx context.Context,
	_ StartDeviceLoginRequestObject,
) (StartDeviceLoginResponseObject, error) {
	login, err := s.Commands.StartDeviceLogin(ctx, metaFrom(ctx))
	return StartDeviceLogin200JSONResponse{
		Handle:                  login.Handle,
		UserCode:                login.UserCode,
		VerificationURI:         login.URI,
		VerificationURIComplete: login.CompleteURI,
		IntervalSeconds:         int64(login.Interval / time.Second),
		ExpiresAt:               login.ExpiresAt,
	}, err
}

// FinishDeviceLogin starts a session once the login is confirmed.
func (s *Server) FinishDeviceLogin(ctx context.Context,
	r FinishDeviceLoginRequestObject,
) (FinishDeviceLoginResponseObject, error) {
	tokens, pending, err := s.Commands.FinishDeviceLogin(ctx, metaFrom(ctx), r.Body.Handle, userAgent(ctx))
	if err == nil && pending {
		return FinishDeviceLogin202Response{}, nil
	}
	return FinishDeviceLogin200JSONResponse(tokensView(ctx, tokens)), err
}
