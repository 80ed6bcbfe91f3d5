"""placeholder"""
def nearest_changes(request): return ""
